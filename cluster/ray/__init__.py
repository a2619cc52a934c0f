"""The components on Ray Serve.

``application`` says how many of each there are and ``deployments`` what each does; ``on_ray`` starts and stops them.
``serve_link`` carries calls from routers to verifiers; ``scaling`` says how many replicas the load asks for.
"""
