"""All that knows another library: Accelerate and transformers. Imported as ``slideformer_backend.integrations``."""
