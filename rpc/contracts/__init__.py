"""Contracts that every folder of `gradwire.rpc` may import: agent, extension, messages, options and workers."""
