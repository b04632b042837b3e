"""The soak: a random world of adapters that change while clients ask a real server, and an oracle of every answer."""
