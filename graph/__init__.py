"""The plan of the house: requests, graphs, placement, and the executor that walks a request over a graph."""
