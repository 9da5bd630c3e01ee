"""Environment reports as people paste them: `sglang.check_env`, torch's, vLLM's and flashinfer's `collect_env`, `nvidia-smi`,
package lists, hand-made tables, tracebacks; alone or several in one text.

Everything here is pure and never raises on any text. Only what has the form of its field gets out: a version, a GPU's
name, a symbol. So what is personal in a report (users, hosts, paths, addresses) has no way into anything that is printed.
"""
