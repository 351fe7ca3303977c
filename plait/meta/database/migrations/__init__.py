"""The database's schema, step by step: what alembic carries out on an older database."""
