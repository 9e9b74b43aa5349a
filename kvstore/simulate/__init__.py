"""What a routing policy would do with a trace: the policies of the live router, over made-up replicas.

families             whole prefixes by name, no time: the tables that can be checked by hand
workload, trace_file requests in time, with the blocks of their prompts
lru, views           what a replica holds, and what a router knows of it
queueing             N replicas, serial prefill, seconds to the first token
fitting              the weight of `scored`, fixed on one half of a trace
golden               published numbers, each computed here again
conversation         reuse of a growing conversation, and tenants apart, with real keys
report, plot         for people
"""
