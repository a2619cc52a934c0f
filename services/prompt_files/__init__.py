"""Reads files of prompts in the forms of public sets, for every command that takes prompts."""
