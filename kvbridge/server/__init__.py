"""The gRPC face of a bridge: servicers, request identity, errors, and the life of the process."""
