"""Requests, the scheduler, KV blocks and the step loop."""
