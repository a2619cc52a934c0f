"""The verifiers of a service together: which one gets a request, and what all of them answer."""
