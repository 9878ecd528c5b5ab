"""The rooms of the pipeline. Each node is a plain class; only `actor.py` knows Ray."""
