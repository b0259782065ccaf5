"""Real clients at work on a served script: `make test-clients`, or `python -m tools.clients [NAME ...]`.

The model behind the endpoint is a script (`script.py`) that reads its prompt and says, in North's format,
what a good model would: look at a file, mend it, check it, report. Everything else is real: the server, the
tokenizer, the parser, the prefix cache, the client, and the tools that it runs.
"""
