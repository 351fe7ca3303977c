"""Alembic migrations of the meta database. ``migrate.py`` runs them; nothing else imports this package."""
