"""The only place that knows what runs where.

``settings`` reads them, ``checks`` looks before a start whether they can work, ``models`` finds the models,
``component_configs`` says what of the settings each component gets, ``build`` composes the components, ``ray`` runs them on
Ray Serve. ``app`` is the import path for ``serve deploy`` and KubeRay.
"""
