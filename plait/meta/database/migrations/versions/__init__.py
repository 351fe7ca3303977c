"""The migrations of the meta database, one module per schema version; ``migrate`` applies them in order."""
