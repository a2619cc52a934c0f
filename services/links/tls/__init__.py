"""Mutual TLS between components, and certificates that are renewed while they are in use."""
