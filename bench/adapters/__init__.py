"""What the bench must know about a proxy: one module each, with the functions of ``bench.contract.Adapter``."""
