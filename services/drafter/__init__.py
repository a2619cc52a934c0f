"""Drafters: one file per source of drafts, the catalogue that finds them, the service that runs their sessions."""
