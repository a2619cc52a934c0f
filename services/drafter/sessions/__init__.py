"""The machinery around sources: requests' sessions, threads, batches of models, drafts made ahead."""
