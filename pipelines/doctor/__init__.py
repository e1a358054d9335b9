"""`penstock doctor`: what is wrong with machines and services, why it matters, and the fix.

A check is a thin reader, which runs a tool or opens a file, and a pure parser and judge of what
that printed. Nothing here imports torch: what needs it runs in a process of its own.
"""
