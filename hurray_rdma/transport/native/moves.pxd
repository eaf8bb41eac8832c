from libc.stdint cimport uint32_t, uint64_t
from ucp cimport ucp_ep_h, ucp_mem_h, ucp_rkey_h, ucp_worker_h, ucs_status_t

cdef extern from "moves.h" nogil:
    enum:
        HURRAY_DESCRIPTION_SIZE

    ctypedef enum hurray_direction_t:
        HURRAY_PUT
        HURRAY_GET

    ctypedef struct hurray_plan_t:
        const uint64_t *local_offsets
        const uint64_t *remote_offsets
        const uint64_t *lengths
        uint64_t count

    ctypedef struct hurray_place_t:
        uint64_t nbytes

    ctypedef struct hurray_rows_t:
        const hurray_place_t *places
        uint64_t num_places
        const uint32_t *src_rows
        const uint32_t *dst_rows
        uint64_t num_rows

    ctypedef struct hurray_outcome_t:
        uint64_t posted
        uint64_t completed
        uint64_t nbytes
        ucs_status_t status
        int settled

    hurray_outcome_t hurray_post(ucp_worker_h worker, ucp_ep_h ep, hurray_direction_t direction, uint64_t local_base,
                                 ucp_mem_h local_memory, uint64_t remote_base, ucp_rkey_h rkey, hurray_plan_t plan,
                                 uint64_t window, const int *stop, uint64_t deadline_ns, char *description)
    ctypedef struct hurray_closing_t:
        pass

    hurray_closing_t *hurray_close_begin(ucp_ep_h ep, int force)
    ucs_status_t hurray_close_wait(ucp_worker_h worker, hurray_closing_t *closing, uint64_t deadline_ns)
    void hurray_close_drop(hurray_closing_t *closing)

    ucs_status_t hurray_flush(ucp_worker_h worker, ucp_ep_h ep, const int *stop, uint64_t deadline_ns)
    hurray_outcome_t hurray_copy(uint64_t src_base, uint64_t dst_base, const uint64_t *src_offsets,
                                 const uint64_t *dst_offsets, const uint64_t *lengths, uint64_t count,
                                 const int *stop, uint64_t deadline_ns)
    int hurray_rows_inside(hurray_rows_t rows, uint64_t src_nbytes, uint64_t dst_nbytes)
    hurray_outcome_t hurray_copy_rows(uint64_t src_base, uint64_t dst_base, hurray_rows_t rows, const int *stop,
                                      uint64_t deadline_ns, uint64_t *bell, uint64_t token)
    int hurray_rings(const uint64_t *bell, uint64_t token, uint64_t timeout_ns)
    void hurray_memcpy(uint64_t src_base, uint64_t dst_base, const uint64_t *src_offsets, const uint64_t *dst_offsets,
                       const uint64_t *lengths, uint64_t count)
    int hurray_map_over(uint64_t from_address, uint64_t to_address, uint64_t nbytes)
    int hurray_unmapped(uint64_t start, uint64_t nbytes)
