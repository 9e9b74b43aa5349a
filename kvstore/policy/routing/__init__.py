"""Routing policies, one a file. The live router and `kvstore simulate` run the same ones.

base         what a policy sees (`Ask`, `Fleet`) and answers (`Choice`); ties
rendezvous   who owns a key
universal    which leading blocks nearly every request has
round_robin, least, power_of_two                 blind to prefixes
session_hash, consistent_hash                    blind to what is really there
affinity, hybrid, scored                         look at matches
make         a policy by its name
"""
