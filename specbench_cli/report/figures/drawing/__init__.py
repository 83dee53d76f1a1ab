"""What all figures are drawn with: one look, panels side by side, labels that find their places."""
