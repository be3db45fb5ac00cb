"""The gRPC services: thin; they parse, call one function of the domain, and answer."""
