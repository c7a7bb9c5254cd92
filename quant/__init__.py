"""Storage formats of cached tokens (installed as ``kvcompress.quant``)."""
