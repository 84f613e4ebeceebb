"""How samples are shared among ranks: pure arithmetic (shares), arrays, and dataset pipelines."""
