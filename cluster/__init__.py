"""The only place that knows what runs where.

``settings`` reads the settings and gives each component its part. ``checks`` finds before a start what cannot work.
``models`` finds the models, ``build`` composes the components, and ``entry`` opens the public ports. ``service`` runs the
service: ``ray`` on Ray Serve, ``process`` in one process. ``outside`` has components that run elsewhere, and ``verifiers``
chooses among several verifiers. ``app`` is the import path for ``serve deploy`` and KubeRay.
"""
