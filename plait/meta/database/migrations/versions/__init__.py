"""One module for each version of the schema."""
