"""A service under load and faults for an hour: every answer checked, every process watched for leaks.

In the order in which it is read: ``requests`` (what users ask), ``exchanges`` and ``doors`` (how they ask it, and what they
saw), ``users`` (how they behave), ``faults``, ``resources``, ``verdict``, ``report``, ``run``. The service under it is in
``component`` (one process), ``component_process`` (its handle), ``relay`` (networks that fail by order) and
``service_processes`` (all of it).
"""
