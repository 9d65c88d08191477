"""The gateway: the only process that speaks to engines on behalf of environments.

`service` holds the handlers and the conversations' life, `conversation` the tokens of one of them, `render` turns
messages into tokens without ever touching a sampled one, `template` the chat template behind it, `library` the
renderers library in its place, `router` picks engines and retries.
"""
