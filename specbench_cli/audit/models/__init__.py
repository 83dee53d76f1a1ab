"""Models for audits: tables with few outcomes, and tiny Llamas."""
