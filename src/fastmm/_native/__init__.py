"""The compiled core. One module is one concept; DESIGN.md says which."""
