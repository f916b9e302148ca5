"""Theorem 1 of the paper as numbers: the error bound, its terms, and the weights that make them small.

    bound.py      the theorem with its appendix, term by term, as written
    costs.py      what of the bound depends on the weights, as a convex function of them, and its minimiser
    estimates.py  the theorem's constants from what can be measured before training

Pure numpy, and nothing of the layers above: whoever has the figures can use it. docs/theory.md explains.
"""
