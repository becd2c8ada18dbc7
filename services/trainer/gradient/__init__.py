"""The control of the accumulated gradient: GAC's decision (`gac`), and its history and projection (`control`)."""
