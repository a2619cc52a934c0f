{{/* Ray's control store in Redis, if it is to be. */}}
{{- define "outrider.controlStore" -}}
{{- with .Values.ray.gcsFaultTolerance -}}
{{- if .enabled -}}
{{- $own := and $.Values.redis.enabled (not .redisAddress) -}}
{{- if not (or $own .redisAddress) -}}
{{- fail "ray.gcsFaultTolerance.enabled is true, but there is no Redis: set redis.enabled, or ray.gcsFaultTolerance.redisAddress" -}}
{{- end -}}
{{- $secret := $own | ternary $.Values.redis.passwordSecretName .passwordSecretName -}}
gcsFaultToleranceOptions:
  redisAddress: {{ $own | ternary (printf "redis://%s-redis:6379" (include "outrider.name" $)) (printf "redis://%s" .redisAddress) }}
  {{- if $secret }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ $secret }}, key: {{ $own | ternary $.Values.redis.passwordSecretKey .passwordSecretKey }}}
  {{- end }}
{{- end -}}
{{- end -}}
{{- end -}}
