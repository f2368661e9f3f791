"""The systems that ``workloads.py`` times, one module each.

A module ``with_NAME`` imports the system and has one function, ``run(problem, settings, stopwatch)``: it trains the
cohorts of ``problem`` from its initial parameters, ticks the stopwatch before the first round and after every one, and
returns a :class:`systems.measure.Outcome`, or None in a process that only helps another one. It runs in the
environment of the system, where nothing but NumPy may be taken for granted.
"""
