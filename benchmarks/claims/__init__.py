"""The claims of papers, with a record of each in `benchmarks/results/claims/`, and two tables that
are larger than a claim: `make claims`.
"""
