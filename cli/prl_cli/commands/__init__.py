"""One module per command. Each imports what it needs inside its functions: resolving a name must stay cheap."""
