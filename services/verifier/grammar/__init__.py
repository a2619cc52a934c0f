"""Answers of a given form: which tokens a request's grammar allows, and drafts that keep to it."""
