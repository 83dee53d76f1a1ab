"""Models for audits: table models, whose random outcomes can be enumerated, and tiny Llamas."""
