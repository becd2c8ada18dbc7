"""What services, clients and job files must agree on: states, records, errors, the base of a job's sections."""
