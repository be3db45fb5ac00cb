"""The front listener: it accepts on the public ports, limits connections, and forwards their bytes to gRPC."""
