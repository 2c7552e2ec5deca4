"""Remote calls over streams: client, server, and streaming calls."""
