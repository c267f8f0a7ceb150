"""Who owns which rank: facts in, commands out. See PROTOCOL.md."""
