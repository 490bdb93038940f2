"""The routes, the connections and the pages of the gateway."""
