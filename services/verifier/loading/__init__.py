"""From files to a model that is served exactly, or a refusal that says why."""
