"""The shared larder: frozen text K/V in pages, named by what made it, lent out under leases."""
