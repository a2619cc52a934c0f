"""Traces of requests by OpenTelemetry's conventions for generative AI: one span per request and component, none per step."""
