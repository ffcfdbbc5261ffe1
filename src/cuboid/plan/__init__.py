"""Which cuboid, how fast, how much memory, before anything runs: every layout of a model on a cluster, ranked.

hardware   what a machine can do, and where each figure is from
time       seconds of a product, of attention, of memory traffic, of a collective on a hierarchy of links
tape       a clock, the links and what is in flight: it simulates a schedule
shared     … where ranks share cores
step       a training step as the model plays it
pipeline   … of a pipeline of cuboids: its split, its schedule, what each place holds
memory     what is alive at the fullest moments of a step
search     every candidate, ranked
explain    why the first is first; what binds where nothing fits
dry        the real model code of one rank, without the others and without data
published  others' measurements, predicted
check      our measurements, predicted
"""
