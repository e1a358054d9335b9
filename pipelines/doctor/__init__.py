"""`penstock doctor`: what is wrong with machines and services, why it matters, and the fix.

A check has two parts: a reader, which runs a tool or opens a file, and pure functions that parse
and assess what that printed. Nothing here imports torch: what needs it runs in its own process.
"""
