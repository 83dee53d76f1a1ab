"""Models for audits: tables whose every outcome can be walked, and tiny Llamas."""
