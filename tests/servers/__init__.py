"""Whole services and their doors for tests: servers, stand-ins, attackers, and what they are judged by."""
