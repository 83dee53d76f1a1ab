"""Timelines of single outputs, as a figure and as a Chrome trace."""
