"""The benchmark harness behind ``slideformer bench``.

Every contender trains the same model on the same tokens in a process of its own; the parent measures the machine's
limits, runs the contenders in interleaved rounds, survives those that fail or hang, and reports. Data flows one way:

    shapes, spec -> contenders, exact, limits -> worker (one contender) -> driver (all) -> reach, report -> command
"""
