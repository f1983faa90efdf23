"""HTTP servers: limits on connections and requests, checks of hosts and origins."""
